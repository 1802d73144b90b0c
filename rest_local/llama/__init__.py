"""The only room that knows llama.cpp: model, vocabulary, detokenizer, context, batch, sampler, chat template.

Importing the package loads nothing, and sets how llama.cpp's threads wait (`waiting`), which has to come first. A
module that needs the library loads it (about 0.3 s).
"""

from rest_local.llama.waiting import set_defaults

set_defaults()

"""The only room that imports llama.cpp: model, vocabulary, detokenizer, context, batch, sampler.

Importing this package loads nothing. It only sets how llama.cpp's threads wait (`cores`), which must happen before
llama.cpp is loaded. A module that needs the library loads it by way of `loaded`, in about 0.3 s.
"""

from rest_local.llama.cores import set_spin_defaults

set_spin_defaults()

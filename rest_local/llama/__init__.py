"""The only room that knows llama.cpp: model, vocabulary, detokenizer, context, batch, sampler, chat template.

Importing the package loads nothing; a module that needs the library loads it (about 0.3 s).
"""

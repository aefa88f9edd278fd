"""Causal language models of torchtitan, behind the calling convention of transformers.

Imported only when such a model is loaded: torchtitan looks at the machine when it is imported.
"""

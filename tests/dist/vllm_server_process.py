"""vLLM's OpenAI-compatible server, whose engine is forked; it has the options of vLLM's own."""

import runpy

from vllm_children import fork_children

if __name__ == "__main__":
    fork_children()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)

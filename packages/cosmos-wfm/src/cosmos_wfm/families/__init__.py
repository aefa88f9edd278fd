"""One module per family of diffusers pipelines: its adapter, and nothing that another needs."""

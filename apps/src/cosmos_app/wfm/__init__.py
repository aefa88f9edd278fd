"""Commands and recipes of world models: diffusion pipelines, not token models."""

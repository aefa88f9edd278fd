"""Supervised fine-tuning as a run of its own: recipe, role and launcher."""

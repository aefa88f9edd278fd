"""Runs on given data, without rollouts: recipes, role and launcher."""

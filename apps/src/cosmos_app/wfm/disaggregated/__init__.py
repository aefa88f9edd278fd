"""Rollouts of world models in processes of their own: weights go there, samples come back."""

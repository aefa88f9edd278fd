"""``cosmos-app evaluate``: what a server makes of the held-out prompts of a recipe."""

"""What a run makes for itself when it is given neither a model nor data."""

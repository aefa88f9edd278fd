"""The dashboard of a run of a world model: its curves, and its validation samples side by side."""

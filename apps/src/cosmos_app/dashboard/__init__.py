"""The dashboard: one page, its HTTP API and figures for Prometheus, made of what a run records."""

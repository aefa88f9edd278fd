"""Running one recipe on many machines: what a cluster is asked for, as its own manifests."""

"""One file per algorithm: what it is called, what it is made of, and where it was published."""

"""The demonstration of world models: coloured shapes, learned from bad captions, then by reward."""

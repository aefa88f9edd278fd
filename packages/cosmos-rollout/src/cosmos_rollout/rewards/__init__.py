"""Rewards of finished samples."""

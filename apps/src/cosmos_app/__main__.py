"""``python -m cosmos_app`` is ``cosmos-app``."""

from cosmos_app.cli import main

main()

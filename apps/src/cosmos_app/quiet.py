"""Third parties' start-up chatter that says nothing to a user is kept off the terminal."""

import logging

# torchao tries every compiled extension it ships, whatever the machine; torch warns torchao.
_CHATTY = ("torchao", "torch.utils._pytree")


def quiet_third_parties() -> None:
    """Let only errors of the chatty loggers through; call it before they are imported."""
    for name in _CHATTY:
        logging.getLogger(name).addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR

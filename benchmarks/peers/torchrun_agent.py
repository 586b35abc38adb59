"""Runs torchrun, and tells the benchmark when its agent finds that a worker has failed."""

import logging

from torch.distributed import run

from peers.telling import tell


class _Teller(logging.Handler):
    """Tells the benchmark of warnings that the agent logs; it logs none while workers are well."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            tell("notice", rank=-1, iteration=0, workers=0)


def main() -> None:
    """Runs torchrun with the arguments of the command line."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(_Teller())
    run.main()


if __name__ == "__main__":
    main()

"""torchrun, which tells when its agent finds that a worker has failed."""

import logging

from torch.distributed import run

from peers.telling import tell


class _Teller(logging.Handler):
    """Tells of what the agent logs about its workers; it logs nothing while they are well."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            tell("notice", rank=-1, iteration=0, workers=0)


def main() -> None:
    """Runs torchrun with the arguments of the command line."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(_Teller())
    run.main()


if __name__ == "__main__":
    main()

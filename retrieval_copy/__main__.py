"""``python -m retrieval_copy``; see :mod:`retrieval_copy.cli`."""

import sys

from retrieval_copy.cli import main

if __name__ == "__main__":
    sys.exit(main())

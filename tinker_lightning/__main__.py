"""`python -m tinker_lightning` is the command `tinker-lightning`."""

import sys

from tinker_lightning.cli import main

sys.exit(main())

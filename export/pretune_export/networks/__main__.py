"""``python -m pretune_export.networks``."""

import sys

from .corpus import main

sys.exit(main())

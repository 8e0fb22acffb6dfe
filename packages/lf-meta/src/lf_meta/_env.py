"""Environment that has to be set before torch loads its OpenMP runtime."""

import os

# Idle OpenMP threads spin by default. On a machine whose cores are busy (loader threads, a second rank)
# spinning costs 14-27x per step (measured on two cores: 28 ms became 730 ms); passive waiting costs nothing.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

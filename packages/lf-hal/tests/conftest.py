"""Hypothesis for a machine that may be busy: how long an example takes decides nothing."""

from hypothesis import HealthCheck, settings

settings.register_profile("lf-hal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lf-hal")

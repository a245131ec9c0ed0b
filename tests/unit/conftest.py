"""What the unit tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an input takes to be drawn says more of the machine than of the test.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

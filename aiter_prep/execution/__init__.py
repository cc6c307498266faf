"""Carries out a plan; the only writer."""

from aiter_prep.execution.run import Progress, default_workers, execute, layouts_of

__all__ = ["Progress", "default_workers", "execute", "layouts_of"]

"""What a folder holds, and what a conversion of it would write."""

from aiter_prep.inspection.forecast import Forecast, RoleBytes, forecast_of_plan
from aiter_prep.inspection.model import ExpertGroup, Outlook
from aiter_prep.inspection.prepared import PreparedInspection, UnfinishedInspection
from aiter_prep.inspection.room import needed_bytes, obstacles
from aiter_prep.inspection.show import Inspection, inspect_path
from aiter_prep.inspection.source import SourceInspection

__all__ = [
    "ExpertGroup",
    "Forecast",
    "Inspection",
    "Outlook",
    "PreparedInspection",
    "RoleBytes",
    "SourceInspection",
    "UnfinishedInspection",
    "forecast_of_plan",
    "inspect_path",
    "needed_bytes",
    "obstacles",
]

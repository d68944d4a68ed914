"""What a run leaves behind: an append-only log of records, a stock MetaSchedule database, a result."""

from pretune.records.database import best_records, latest_finals, write_database
from pretune.records.folder import RunFolder
from pretune.records.log import RecordLog
from pretune.records.record import Record, make_record, target_key, trace_key

__all__ = [
    "Record",
    "RecordLog",
    "RunFolder",
    "best_records",
    "latest_finals",
    "make_record",
    "target_key",
    "trace_key",
    "write_database",
]

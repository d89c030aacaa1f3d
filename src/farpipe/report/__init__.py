"""Reports: tables, Gantt charts, traces and the report page."""

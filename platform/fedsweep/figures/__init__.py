"""Pictures: one look for runs, tables and reports."""

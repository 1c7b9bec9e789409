"""The papers' tables and figures: from a table's file to runs, figures measured beside printed, and pictures."""

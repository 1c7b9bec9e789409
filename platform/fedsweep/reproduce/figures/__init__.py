"""Pictures of tables: of their cells, of runs, of models, of chosen groups."""

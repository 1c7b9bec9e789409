"""The commands of ``fedsweep``, thin: they parse, call and print. What they need is imported when they run."""

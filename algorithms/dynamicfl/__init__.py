"""DynamicFL: two groups at two rates, and who is in the fast one."""

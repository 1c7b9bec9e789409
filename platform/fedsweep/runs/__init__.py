"""What a run leaves: its folder and files, and who may write them."""

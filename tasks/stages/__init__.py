"""What the pipeline does: one folder per stage, each with stage.py and settings.py."""

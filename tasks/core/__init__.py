"""What everything stands on: records, settings, files, processes, text. Imports nothing of ours."""

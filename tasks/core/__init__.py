"""What everything else uses: records, settings, files, processes, text. Imports nothing of ours."""

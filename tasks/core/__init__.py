"""What everything else uses: records, settings, files, processes, text. Imports no other room."""

"""The report: one folder with a page that shows a run's numbers and ten of its episodes side by side."""

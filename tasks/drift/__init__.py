"""Do the tools still answer as they did when the data was curated?"""

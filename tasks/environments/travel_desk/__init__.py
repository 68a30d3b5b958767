"""travel_desk: the stateful back office of the demo."""

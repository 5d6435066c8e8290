"""One trainer per method. All trainers share one loop."""

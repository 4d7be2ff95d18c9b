"""Physical memory behind the pool."""

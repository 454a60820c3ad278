"""The one place that knows NVFlare: kits, jobs, what runs inside them, and who watches over them."""

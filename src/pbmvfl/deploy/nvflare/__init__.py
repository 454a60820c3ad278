"""What of a deployment needs NVFlare: kits, the processes of sites, jobs. Nothing outside this folder imports it."""

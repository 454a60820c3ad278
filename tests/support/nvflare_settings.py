"""Imported for what it does: cells of this very process have NVFlare's own settings.

It would look for a file of settings in every folder below that which tests are run in, where a demonstration may have
left kits.
"""

from nvflare.fuel.f3.comm_config import CommConfigurator

CommConfigurator._config_loaded = True

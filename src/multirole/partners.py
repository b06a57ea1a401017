"""The partners of a run: the roles of its policy map that are played and never trained."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from peft import PeftModel

from multirole.callbacks import Trainer
from multirole.engines.endpoint import RECORD, Endpoint, ReplyRecord, WithEndpoints, check_endpoint
from multirole.engines.protocol import Engine
from multirole.inputs.adapters import check_base_alone, check_frozen, load_frozen
from multirole.options import MultiRoleGRPOConfig
from multirole.policy import (
    adapter_names,
    adapters_served,
    frozen_folders,
    partner_facts,
    past_copies,
    player_of,
    trained_part,
)
from multirole.rollout.past_selves import PastSelves
from multirole.rollout.rollout import Speaker


class Partners:
    """Loads the partners of a parsed policy map, and says what answers the calls of each role.

    Attributes:
        roles: the roles that are not trained.
        served: the names of all adapters that an engine serves: the trained ones and, once `add_to` was called, those of partners.
        past: the past selves, once `add_to` was called.
    """

    past: PastSelves

    def __init__(self, policy: Mapping[str, str]) -> None:
        self.policy, self.facts = policy, partner_facts(policy)
        self.trained, self.roles = trained_part(policy), self.facts["partner_roles"]
        self.served = adapter_names(policy)

    def check(self, args: MultiRoleGRPOConfig, callbacks: Iterable[Any]) -> None:
        """Refuse partners that cannot play, before a model is loaded (ValueError): a folder without an adapter, a server that does not answer."""
        replaying = [type(c).__name__ for c in callbacks if getattr(c, "replays_episodes", False)]
        args.check(replaying_credit=next(iter(replaying), None))
        check_frozen(frozen_folders(self.policy))
        for role in self.facts["endpoint_roles"]:
            check_endpoint(role, Endpoint.from_text(self.policy[role]))

    def add_to(self, model: PeftModel, args: MultiRoleGRPOConfig) -> None:
        """Add the frozen adapters and the past selves to the model that trains the others."""
        if self.facts["local_partners"]:
            check_base_alone(model, "Let another base play it.")
        load_frozen(model, frozen_folders(self.policy))
        self.past = PastSelves(model, past_copies(self.policy, args.past_selves), args.past_every, args.past_selves)
        self.served = adapters_served(self.policy, args.past_selves)

    def with_endpoints(self, engine: Engine, trainer: Trainer) -> Engine:
        """Return the engine, or one that asks the endpoints as well."""
        if not self.facts["endpoint_roles"]:
            return engine
        folder = Path(trainer.args.output_dir) / RECORD
        record = ReplyRecord(folder, trainer.accelerator.process_index, lambda: trainer.clock.started)
        return cast("Engine", WithEndpoints(engine, record))

    @property
    def past_numbers(self) -> list[int] | None:
        """`past_every` and `past_selves`, where past selves play."""
        return [self.past.every, self.past.n] if self.past.places else None

    def players(self, policy: Mapping[str, str | None], iteration: int) -> dict[str, Speaker]:
        """Return what answers the calls of each role of a map after `iteration` iterations."""
        past = self.past.playing(iteration)
        return {role: player_of(value, past) for role, value in policy.items()}

    def versions(self, iteration: int) -> dict[str | None, int | None]:
        """Return the number of iterations for which each adapter had been trained that is not trained up to the present; None for frozen ones."""
        if not self.facts["local_partners"]:
            return {}
        return dict.fromkeys([None, *frozen_folders(self.policy)]) | dict(self.past.versions(iteration))

"""Which cases give another result than was recorded first, on purpose, and why.

A case named here is compared with ``values_changed/`` instead of ``values/``: what was recorded
first stays as it is. To change a result on purpose:

1. name the case here, with the reason;
2. run ``python -m tests.recorded.record``, which writes the new result to ``values_changed/``;
3. commit both.
"""

from __future__ import annotations

_DIVISION = "one division of rows serves every automatic choice: by position, from the same seed"
_INWARD = "a negative threshold shrinks the band of FCQR, which covered 1.00 where 0.70 was asked"

_BANDWIDTH = (
    *(
        f"{method}_auto_bandwidth_{kernel}"
        for method in ("lcp", "fflcp", "lcqr", "fflcqr")
        for kernel in ("gaussian", "laplace", "box", "nearest", "on_input", "options")
    ),
    "ffcp_auto_choose_long_stream_that_stops_choosing",
    "lcp_auto_bandwidth_more_points_than_choose",
    "lcp_auto_bandwidth_guarantee_random",
    "fflcp_auto_bandwidth_on_feature",
    "lcp_auto_bandwidth_loader_cuts",
    "lcp_auto_bandwidth_joint_true",
    "lcp_auto_bandwidth_several_outputs",
    "lcp_auto_bandwidth_update",
    "lcp_auto_bandwidth_save_and_load",
    "lcp_auto_bandwidth_state_dict",
    "fflcp_auto_both",
    "fflcp_auto_both_options",
    "fflcqr_auto_both",
    "fflcqr_auto_both_options",
    "fflcp_auto_both_all_layers_save_and_load",
)

_BY_ROW = (
    "lengths of steps belong to rows: those of a call came after its directions, so that a row had "
    "another one with every number of rows beside it"
)
_RANDOM = (
    *(
        f"{method}_{kernel}_guarantee_random"
        for method in ("lcp", "fflcp")
        for kernel in ("laplace", "box")
    ),
    "lcp_random_seed_5",
    "lcp_random_on_input_in_batches",
)

_EXACT_LEVEL = "the exact level of localized quantiles in place of its bound: bands are shorter"
_LEVEL = {
    "lcp": """
        arrays update merge_two_workers save_and_load state_dict joint_false joint_true
        joint_0.75 input_dict_on_input input_tuple_on_input input_one_dict_on_input
        input_dict_on_a input_tuple_on_a input_one_dict_on_a gaussian_guarantee_marginal
        gaussian_guarantee_level laplace_guarantee_marginal laplace_guarantee_level
        box_guarantee_marginal box_guarantee_level on_input on_0 on_3 nearest_on_input
        on_function merge_and_update_of_an_empty_one points_at_the_same_place
        maps_joint_true gaussian_too_narrow_warning box_too_narrow_warning
        auto_bandwidth_gaussian auto_bandwidth_laplace auto_bandwidth_box
        auto_bandwidth_nearest auto_bandwidth_on_input auto_bandwidth_joint_true
        auto_bandwidth_several_outputs auto_bandwidth_more_points_than_choose
        auto_bandwidth_update auto_fit_localizer auto_fit_localizer_planned
    """,
    "fflcp": """
        arrays update merge_two_workers save_and_load state_dict joint_false joint_true
        joint_0.75 input_dict_on_input input_tuple_on_input input_one_dict_on_input
        input_dict_on_a input_tuple_on_a input_one_dict_on_a gaussian_guarantee_marginal
        laplace_guarantee_marginal box_guarantee_marginal nearest_guarantee_marginal
        on_input on_0 on_3 nearest_on_input on_function on_feature norm_1 norm_inf
        method_sketch gaussian_too_narrow_warning box_too_narrow_warning
        auto_bandwidth_gaussian auto_bandwidth_box auto_bandwidth_nearest
        auto_bandwidth_on_input auto_bandwidth_on_feature auto_fit_localizer
        auto_choose_bandwidth_given auto_both auto_both_options
    """,
    "lcqr": """
        arrays update merge_two_workers save_and_load state_dict joint_false joint_0.75
        input_dict_on_input input_tuple_on_input input_one_dict_on_input input_dict_on_a
        input_tuple_on_a input_one_dict_on_a gaussian_guarantee_marginal
        laplace_guarantee_marginal box_guarantee_marginal nearest_guarantee_marginal
        on_input on_0 on_3 nearest_on_input on_function gaussian_too_narrow_warning
        box_too_narrow_warning auto_bandwidth_laplace auto_bandwidth_box
        auto_bandwidth_nearest auto_fit_localizer
    """,
    "fflcqr": """
        arrays update merge_two_workers save_and_load state_dict joint_false joint_true
        joint_0.75 input_dict_on_input input_tuple_on_input input_one_dict_on_input
        input_dict_on_a input_tuple_on_a input_one_dict_on_a gaussian_guarantee_marginal
        laplace_guarantee_marginal box_guarantee_marginal nearest_guarantee_marginal
        on_input on_0 on_3 nearest_on_input on_function on_feature norm_inf
        gaussian_too_narrow_warning box_too_narrow_warning auto_bandwidth_gaussian
        auto_bandwidth_laplace auto_bandwidth_box auto_bandwidth_nearest
        auto_bandwidth_on_input auto_fit_localizer auto_choose_bandwidth_given auto_both
        auto_both_options
    """,
}

_UNITS = "outputs that share a threshold are scaled, on rows set aside: units do not matter"
_JOINT = """
    cp_joint_true cp_joint_0.75 cp_groups_joint_true cp_missing_joint_true
    cp_missing_joint_0.75 ffcp_joint_true ffcp_joint_0.75 ffcp_groups_joint_true
    ffcp_missing_joint_true ffcp_missing_joint_0.75 cqr_joint_true cqr_joint_0.75
    cqr_groups_joint_true cqr_missing_joint_true cqr_missing_joint_0.75 ffcqr_joint_true
    ffcqr_joint_0.75 ffcqr_groups_joint_true ffcqr_missing_joint_true
    ffcqr_missing_joint_0.75 ffcp_auto_choose_joint_true
    ffcp_auto_choose_joint_0.75 ffcqr_auto_choose_among_a_list_joint_true lcp_joint_true
    lcp_joint_0.75 fflcp_joint_true fflcp_joint_0.75 lcqr_joint_true lcqr_joint_0.75
    fflcqr_joint_true fflcqr_joint_0.75 lcp_auto_bandwidth_joint_true
"""
_CROSSING = "without randomness the label that crosses the threshold is in, and shares calibrate"
_FIXED = (
    *(
        f"{method}_{kind}"
        for method in ("aps", "raps", "ffraps_softmax", "ffraps_feature")
        for kind in (
            "randomized_false",
            "class_conditional_randomized_false",
            "randomized_false_allow_zero_sets",
        )
    ),
    "aps_equal_logits",
    "raps_equal_logits",
    "ffraps_softmax_equal_logits",
    "raps_auto_size_not_randomized",
)

_WORST = "the interval of the worst group allows for how many groups it is the worst of"
_METRICS = (
    "metrics_of_bands",
    "metrics_of_bands_of_several_outputs",
    "metrics_of_infinite_bands",
    "metrics_of_sets",
)

_STREAM = (
    "random localization has a stream of its own: with the same seed it drew the numbers that "
    "numpy draws for the user"
)
_STREAMED = (
    *(
        f"{method}_{kernel}_guarantee_random"
        for method in ("lcp", "fflcp")
        for kernel in ("gaussian", "laplace", "box")
    ),
    "lcp_random_seed_5",
    "lcp_random_on_input_in_batches",
    "lcp_auto_bandwidth_guarantee_random",
)
_UNION = "candidates are compared at the level of one output, as intervals are then made"
_STRATA = f"{_WORST}; strata by length are numbered"

CHANGED: dict[str, str] = {
    **dict.fromkeys(_METRICS, _WORST),
    **dict.fromkeys(_METRICS[:3], _STRATA),
    **dict.fromkeys(_FIXED, _CROSSING),
    **dict.fromkeys(_RANDOM, _BY_ROW),
    **dict.fromkeys(_BANDWIDTH, _DIVISION),
    "fcqr_descent_arrays": _INWARD,
    "fcqr_exact_arrays": _INWARD,
    **{
        f"{method}_{rest}": _EXACT_LEVEL
        for method, names in _LEVEL.items()
        for rest in names.split()
    },
    **dict.fromkeys(_JOINT.split(), _UNITS),
    **dict.fromkeys(_STREAMED, _STREAM),
    "fcp_auto_steps_joint_bonferroni": _UNION,
    "ffcp_auto_choose_joint_bonferroni": _UNION,
}

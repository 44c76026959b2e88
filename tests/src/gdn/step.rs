//! A decode step of a case: its sequences are the tokens of each request, its states lie in a pool that is updated in place.

use terrace_kernels::{Decode, Dtype, Error, Indices, Place, PoolMut, Tensor, TensorMut};

use super::machine::Machine;
use super::{CANARY, Case, DIM, Outcome, STATE, decode, encode, shuffled};

/// Runs it, with the requests that `padding` names in slot -1, and checks that nothing else was written.
///
/// # Panics
/// Something else was written.
pub fn run(machine: &mut dyn Machine, case: &Case, pool: Dtype, padding: &[usize]) -> Result<Outcome, Error> {
    let (keys, values) = case.heads;
    let (tokens, n) = (case.tokens, case.sequences());
    let place = machine.place();
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|values| machine.upload(&encode(values, case.dtype)));
    let [g, beta] = [&case.g, &case.beta].map(|values| machine.upload(&encode(values, case.gates)));
    let out_bytes = tokens * values * DIM * case.dtype.bytes() as usize;
    let out = machine.upload(&vec![CANARY; out_bytes]);
    let (mut slots, count) = shuffled(n);
    let slot_of = slots.clone();
    padding.iter().for_each(|n| slots[*n] = -1);
    let state_bytes = values * STATE * pool.bytes() as usize;
    let mut before = vec![CANARY; count * state_bytes];
    for (slot, h0) in slot_of.iter().zip(case.h0.as_ref().expect("a decode step has states").chunks(values * STATE)) {
        before[*slot as usize * state_bytes..][..state_bytes].copy_from_slice(&encode(h0, pool));
    }
    let pool_address = machine.upload(&before);
    let cu: Vec<i32> = case.cu.iter().map(|bound| *bound as i32).collect();
    let bytes = |values: &[i32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (cu_address, slots_address) = (machine.upload(&bytes(&cu)), machine.upload(&bytes(&slots)));
    let tensor = |address, heads: usize| {
        // SAFETY: the machine keeps what was uploaded until `clear`; it holds rows of that shape.
        unsafe { Tensor::from_raw(place, address, case.dtype, [tokens as u64, heads as u64, DIM as u64]) }
    };
    // SAFETY: as above.
    let gate = |address| unsafe { Tensor::from_raw(place, address, case.gates, [tokens as u64, values as u64, 1]) };
    let indices = |host, address, len: usize| match place {
        Place::Host => Indices::host(host),
        // SAFETY: as above.
        Place::Device => unsafe { Indices::device(address, len as u64) },
    };
    let args = Decode {
        q: tensor(q, keys),
        k: tensor(k, keys),
        v: tensor(v, values),
        g: gate(g),
        beta: gate(beta),
        // SAFETY: as above, and nothing else refers to it.
        o: unsafe { TensorMut::from_raw(place, out, case.dtype, [tokens as u64, values as u64, DIM as u64]) },
        cu_seqlens: indices(&cu, cu_address, cu.len()),
        slots: indices(&slots, slots_address, n),
        // SAFETY: as above.
        pool: unsafe { PoolMut::from_raw(place, pool_address, pool, [count as u64, values as u64]) },
        scale: case.scale,
        l2norm: case.l2norm,
    };
    let result = terrace_kernels::decode(&machine.device(), args);
    machine.check_guards(&case.name);
    let written = machine.download(out, out_bytes);
    let row = (values * DIM) * case.dtype.bytes() as usize;
    let is_written = |token: usize| {
        let sequence = (0..n).find(|n| (case.cu[*n] as usize..case.cu[n + 1] as usize).contains(&token));
        result.is_ok() && sequence.is_some_and(|n| !padding.contains(&n))
    };
    for (token, row) in written.chunks_exact(row).enumerate().filter(|(token, _)| !is_written(*token)) {
        assert!(row.iter().all(|byte| *byte == CANARY), "{}: o of token {token}, which is padding", case.name);
    }
    let after = machine.download(pool_address, before.len());
    for slot in 0..count {
        let owner = (0..n).find(|n| slot_of[*n] as usize == slot);
        if result.is_ok() && owner.is_some_and(|n| !padding.contains(&n)) {
            continue;
        }
        let range = slot * state_bytes..(slot + 1) * state_bytes;
        assert_eq!(after[range.clone()], before[range], "{}: slot {slot} of no request", case.name);
    }
    let states = slot_of.iter().flat_map(|slot| decode(&after[*slot as usize * state_bytes..][..state_bytes], pool));
    let ht = states.collect();
    machine.clear();
    Ok(Outcome { o: decode(&written, case.dtype), ht, checkpoints: Vec::new(), path: result? })
}

-- Shared: how a job enters the queue. A submit block, as `submit` and a commit's outbox carry it, is twenty-two values:
-- id, sig, owner, prio, queue, client, delay_ms, prepare, on_outage, idem, digest, kind, name, options, spec, count (calls that an
-- array stands for, 0 for a plain job), after (ids, comma between), policy ('succeeded' or 'ended'), permit (`key=limit`), rate
-- (`key=limit/window_ms`), keep_ms (how long its result is kept, 0 for the namespace's own time),
-- lane (h_rides.lua; '' for none)

H.BLOCK = 22

function H.block(A, i)
  return {id = A[i], sig = A[i + 1], owner = A[i + 2], prio = A[i + 3], queue = A[i + 4], client = A[i + 5], delay = tonumber(A[i + 6]),
          prepare = A[i + 7], on_outage = A[i + 8],
          idem = A[i + 9] ~= '' and A[i + 2] .. '/' .. A[i + 9] or '', digest = A[i + 10], kind = A[i + 11], name = A[i + 12],
          options = A[i + 13], spec = A[i + 14], count = tonumber(A[i + 15]), after = A[i + 16],
          policy = A[i + 17], permit = A[i + 18], rate = A[i + 19], keep = tonumber(A[i + 20]), lane = A[i + 21]}
end

-- names become parts of keys, and a priority outside 0 to 4 would never be claimed: whatever sends it, it is refused
function H.wrong(b)
  for name, value in pairs({id = b.id, owner = b.owner, queue = b.queue, sig = b.sig, client = b.client ~= '' and b.client or '-'}) do
    if not string.find(value, '^[^%s:]+$') then return H.refuse('submit', name .. ' is empty, or holds a blank or a colon') end
  end
  if not string.find(b.prio, '^[0-4]$') then return H.refuse('submit', 'priority ' .. b.prio) end
  if not b.count or b.count < 0 or b.count ~= math.floor(b.count) then return H.refuse('submit', 'count') end
  if b.permit ~= '' and not string.find(b.permit, '^[^%s:]+=[1-9]%d*$') then return H.refuse('submit', 'permit ' .. b.permit) end
  if b.rate ~= '' and not string.find(b.rate, '^[^%s:]+=[1-9]%d*/[1-9]%d*$') then return H.refuse('submit', 'rate ' .. b.rate) end
  if b.policy ~= '' and b.policy ~= 'succeeded' and b.policy ~= 'ended' then return H.refuse('submit', 'policy ' .. b.policy) end
  if string.find(b.id, '/', 1, true) then return H.refuse('submit', 'id holds a slash') end
  if not b.keep or b.keep < 0 or b.keep ~= b.keep then return H.refuse('submit', 'keep') end
  if not b.delay or b.delay < 0 or b.delay ~= b.delay then return H.refuse('submit', 'delay') end
  return nil
end

function H.known(P, sig) return redis.call('HEXISTS', P .. 'signatures', sig) == 1 end

-- makes a job runnable now and wakes a worker for it
function H.ready(P, id, sig, owner, prio, now)
  local seq = H.append(P, id, sig, owner, prio)
  redis.call('HSET', H.job(P, id), 'state', 'queued', 'phase', 'ready', 'entry', seq .. '-0', 'queued_ms', now)
  return H.ring(P, sig, now, nil)
end

-- the keeper sleeps until the next due time: an earlier one rings it
function H.delay(P, id, due)
  redis.call('ZADD', P .. 'delayed', due, id)
  if redis.call('ZRANGE', P .. 'delayed', 0, 0)[1] ~= id then return end
  local keeper = redis.call('GET', P .. 'keeper')
  if keeper then H.mail(P, keeper, 'timer') end
end

-- an idempotency key that was used before answers with its job, or with `conflict` where the request differs
function H.repeated(P, b)
  if redis.call('EXISTS', H.job(P, b.id)) == 1 and not H.sent_anew(P, b) then return {'existing', b.id} end
  if b.idem == '' then return nil end
  local known = redis.call('GET', P .. 'idem:' .. b.idem)
  if not known then return nil end
  local id, digest = string.match(known, '^(%S+) (.*)$')
  return {digest == b.digest and 'existing' or 'conflict', id}
end

-- writes the record; the caller has looked at H.repeated, H.known and H.gates
function H.create(P, b, g, now)
  local seq = redis.call('INCR', P .. 'seq')
  redis.call('HSET', H.job(P, b.id), 'spec', b.spec, 'signed', '', 'sig', b.sig, 'owner', b.owner, 'prio', b.prio, 'queue', b.queue,
             'kind', b.kind, 'name', b.name, 'options', b.options, 'prepare', b.prepare, 'attempt', 0, 'seq', seq, 'created_ms', now,
             'state', 'queued')
  local rare = b.count > 0 and {'count', b.count} or {}
  if b.lane ~= '' then rare[#rare + 1] = 'lane'; rare[#rare + 1] = b.lane end
  if b.keep > 0 then rare[#rare + 1] = 'keep_ms'; rare[#rare + 1] = b.keep end
  if b.client ~= '' then rare[#rare + 1] = 'client'; rare[#rare + 1] = b.client end
  if b.on_outage ~= '' then rare[#rare + 1] = 'on_outage'; rare[#rare + 1] = b.on_outage end
  if b.idem ~= '' then
    rare[#rare + 1] = 'idem'; rare[#rare + 1] = b.idem
    redis.call('SET', P .. 'idem:' .. b.idem, b.id .. ' ' .. b.digest)
  end
  if #rare > 0 then redis.call('HSET', H.job(P, b.id), unpack(rare)) end
  redis.call('ZADD', P .. 'jobs:queued', seq, b.id)
  redis.call('HINCRBY', P .. 'open', b.queue, 1)
  redis.call('HINCRBY', P .. 'sigjobs', b.sig, 1)
  redis.call('ZADD', P .. 'sigseen', now, b.sig)
  H.event(P, b.id, 'queued', now)
  local gated = H.set_gates(P, b, g, seq)
  if g.failed then return H.finish(P, H.load(P, b.id), 'cancelled', 'predecessor_failed', {}, now) end
  if b.delay > 0 then
    redis.call('HSET', H.job(P, b.id), 'phase', 'delayed')
    H.delay(P, b.id, now + b.delay)
    return nil
  end
  if gated then return H.enter(P, b.id, now) end
  return H.ready(P, b.id, b.sig, b.owner, b.prio, now)
end

-- Shared: how a job enters the queue. A submit block, as `submit` and a commit's outbox carry it, is twenty-four values:
-- id, sig, owner, prio, queue, client, kind, name, options, spec, lane (h_rides.lua; '' for none), and what few jobs have: delay_ms,
-- prepare, on_outage, idem, digest, count (calls that an array stands for, 0 for a plain job), after (ids, comma between), policy
-- ('succeeded' or 'ended'), permit (`key=limit`), rate (`key=limit/window_ms`), keep_ms (how long its result is kept, 0 for the
-- namespace's own time), timeout_ms (that ends an attempt, 0 for none), signed (a signature of the spec, '' for none). A call that
-- ends with its block may leave these thirteen out.

H.BLOCK = 24

-- what is true of a job whose block ends early
local PLAIN = {__index = {is_plain = true, delay = 0, prepare = '0', on_outage = '', idem = '', digest = '', count = 0, after = '',
                          policy = '', permit = '', rate = '', keep = 0, timeout = 0, signed = ''}}

function H.block(A, i)
  local b = {id = A[i], sig = A[i + 1], owner = A[i + 2], prio = A[i + 3], queue = A[i + 4], client = A[i + 5], kind = A[i + 6],
             name = A[i + 7], options = A[i + 8], spec = A[i + 9], lane = A[i + 10]}
  if not A[i + 11] then return setmetatable(b, PLAIN) end
  b.idem = A[i + 14] ~= '' and b.owner .. '/' .. A[i + 14] or ''
  b.delay, b.prepare, b.on_outage, b.digest = tonumber(A[i + 11]), A[i + 12], A[i + 13], A[i + 15]
  b.count, b.after, b.policy, b.permit, b.rate = tonumber(A[i + 16]), A[i + 17], A[i + 18], A[i + 19], A[i + 20]
  b.keep, b.timeout, b.signed = tonumber(A[i + 21]), tonumber(A[i + 22]), A[i + 23]
  return b
end

local RANKS = {['0'] = true, ['1'] = true, ['2'] = true, ['3'] = true, ['4'] = true}
local fine, how_many = {}, 0  -- names that were looked at last: an owner, a queue, a signature and a client come again and again

local function is_fine(name)
  if fine[name] then return true end
  if not string.find(name, '^[^%s:]+$') then return false end
  if how_many == 4096 then fine, how_many = {}, 0 end
  fine[name], how_many = true, how_many + 1
  return true
end

local function wrong_rarities(b)
  if not b.count or b.count < 0 or b.count ~= math.floor(b.count) then return 'count' end
  if b.permit ~= '' and not string.find(b.permit, '^[^%s:]+=[1-9]%d*$') then return 'permit ' .. b.permit end
  if b.rate ~= '' and not string.find(b.rate, '^[^%s:]+=[1-9]%d*/[1-9]%d*$') then return 'rate ' .. b.rate end
  if b.policy ~= '' and b.policy ~= 'succeeded' and b.policy ~= 'ended' then return 'policy ' .. b.policy end
  if not b.keep or b.keep < 0 or b.keep ~= b.keep then return 'keep' end
  if not b.timeout or b.timeout < 0 or b.timeout ~= b.timeout then return 'timeout' end
  if not b.delay or b.delay < 0 or b.delay ~= b.delay then return 'delay' end
  return nil
end

local function wrong_name(b)
  if not string.find(b.id, '^[^%s:]+$') then return 'id' end
  if not is_fine(b.owner) then return 'owner' end
  if not is_fine(b.queue) then return 'queue' end
  if not is_fine(b.sig) then return 'sig' end
  if b.client ~= '' and not is_fine(b.client) then return 'client' end
  return nil
end

-- names become parts of keys, and a priority outside 0 to 4 would never be claimed: whatever sends it, it is refused
function H.wrong(b)
  local name = wrong_name(b)
  if name then return H.refuse('submit', name .. ' is empty, or holds a blank or a colon') end
  if not RANKS[b.prio] then return H.refuse('submit', 'priority ' .. b.prio) end
  if string.find(b.id, '/', 1, true) then return H.refuse('submit', 'id holds a slash') end
  local rarity = not b.is_plain and wrong_rarities(b)
  return rarity and H.refuse('submit', rarity) or nil
end

function H.known(P, sig) return redis.call('HEXISTS', P .. 'signatures', sig) == 1 end

-- makes a job that has waited runnable now, at a new age, and wakes a worker for it
function H.ready(P, id, sig, owner, prio, now)
  local entry = H.append(P, id, sig, owner, prio, H.next_age(P))
  redis.call('HSET', H.job(P, id), 'state', 'queued', 'phase', 'ready', 'entry', entry, 'queued_ms', now)
  return H.ring(P, sig, now, nil, {owner = owner, prio = prio})
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

-- what few jobs have, and all others' records are spared
local function rare_fields(b, g)
  local r = {}
  local function add(name, value) r[#r + 1] = name; r[#r + 1] = value end
  if b.prepare == '1' then add('prepare', '1') end
  if b.count > 0 then add('count', b.count) end
  if b.keep > 0 then add('keep_ms', b.keep) end
  if b.timeout > 0 then add('timeout_ms', b.timeout) end
  if b.signed ~= '' then add('signed', b.signed) end
  if b.on_outage ~= '' then add('on_outage', b.on_outage) end
  if b.idem ~= '' then add('idem', b.idem) end
  if b.after ~= '' then add('after', b.after); add('policy', b.policy); add('waits', #g.open) end
  if b.permit ~= '' then add('permit', b.permit) end
  if b.rate ~= '' then add('rate', b.rate) end
  return r
end

-- what a plain job may have or not: a field that would say nothing is not there
local function frequent_fields(b)
  if b.client == '' and b.lane == '' and b.options == '' then return end
  local r = {}
  if b.client ~= '' then r[1], r[2] = 'client', b.client end
  if b.lane ~= '' then r[#r + 1] = 'lane'; r[#r + 1] = b.lane end
  if b.options ~= '' then r[#r + 1] = 'options'; r[#r + 1] = b.options end
  return unpack(r)
end

local function write_record(P, b, g, seq, phase, entry, queued_ms, created_ms)
  redis.call('HSET', H.job(P, b.id), 'state', 'queued', 'seq', seq, 'sig', b.sig, 'owner', b.owner, 'prio', b.prio, 'queue', b.queue,
             'attempt', '0', 'kind', b.kind, 'entry', entry, 'phase', phase, 'queued_ms', queued_ms, 'created_ms', created_ms,
             'name', b.name, 'spec', b.spec, frequent_fields(b))
  local rare = not b.is_plain and rare_fields(b, g)
  if rare and #rare > 0 then redis.call('HSET', H.job(P, b.id), unpack(rare)) end
end

local function enter_counts(P, b, seq)
  H.place(P .. 'jobs:queued', b.id, seq)
  if H.count(P .. 'sigjobs', b.sig, 1) == 1 then redis.call('ZREM', P .. 'idlesigs', b.sig) end
  if b.idem ~= '' then redis.call('SET', P .. 'idem:' .. b.idem, b.id .. ' ' .. b.digest) end
end

-- puts the job in its place and writes the record; the caller has looked at H.repeated, H.known and H.gates. One that nothing
-- holds back enters its stream at once, at its own age. Its times are what its event tells: to ask the clock costs more than that
function H.create(P, b, g, now)
  local seq = H.next_age(P)
  local at = H.told_at(H.event(P, b.id, 'queued'))
  local at_once = b.is_plain or b.delay == 0 and b.after == '' and b.permit == '' and b.rate == ''
  if at_once then write_record(P, b, g, seq, 'ready', H.append(P, b.id, b.sig, b.owner, b.prio, seq), at, at)
  else write_record(P, b, g, seq, b.delay > 0 and 'delayed' or '', '', '', at) end
  enter_counts(P, b, seq)
  if at_once then return H.ring(P, b.sig, now, nil, b) end
  now = now or H.now()
  H.set_gates(P, b, g, seq)
  if g.failed then return H.finish(P, H.load(P, b.id), 'cancelled', 'predecessor_failed', {}, now) end
  if b.delay > 0 then return H.delay(P, b.id, now + b.delay) end
  return H.enter(P, b.id, now)
end
